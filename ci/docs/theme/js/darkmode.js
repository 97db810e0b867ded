"use strict";
// The site is light or dark as the system is; the theme's own script needs a highlighter that is loaded from elsewhere.
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.setAttribute("data-bs-theme", dark.matches ? "dark" : "light");
follow();
dark.addEventListener("change", follow);
