"""`python -m ci.docs configuration` writes the configuration reference and the table of features in the README,
`recipes` what `fuse.preset=fast` chooses for the recipes of GPUs, `site` builds the site, and `picture TITLE=RUN...`
draws the picture of the README from the folders of runs ("verl, observed" is one in observe mode)."""

import sys
from pathlib import Path

from ci.docs.configuration import PAGE, README, reference, with_fits
from ci.docs.recipes import pages
from ci.docs.site import REPO, build
from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.files import readable_steps, recorded_steps
from verl_fuse.timeline.picture import picture

SITE = REPO / "build/site"
PICTURE = Path(__file__).with_name("steps.svg")


def typical_step(run: Path) -> Timeline:
    """Return the step of median length of a run, without the first step, which warms up."""
    steps = list(readable_steps(run, recorded_steps(run)[1:]))
    return sorted(steps, key=lambda step: step.end - step.start)[len(steps) // 2]


def main(arguments: list[str]) -> int:
    """Run the command, and return the exit code."""
    try:
        if arguments == ["configuration"]:
            PAGE.write_text(reference(), encoding="utf-8")
            README.write_text(with_fits(README.read_text()), encoding="utf-8")
            print(PAGE.relative_to(REPO), README.relative_to(REPO))
        elif arguments == ["recipes"]:
            for page, text in pages():
                page.write_text(text, encoding="utf-8")
                print(page.relative_to(REPO))
        elif arguments == ["site"]:
            build(SITE)
            print(Path(SITE, "index.html").relative_to(REPO))
        elif arguments[:1] == ["picture"] and all("=" in each for each in arguments[1:]) and arguments[1:]:
            named = [each.rpartition("=") for each in arguments[1:]]
            steps = [(title, typical_step(Path(run))) for title, _, run in named]
            PICTURE.write_text(picture(steps, ground="#fff"), encoding="utf-8")
            print(PICTURE.relative_to(REPO))
        else:
            given = " ".join(arguments) or "no argument"
            raise FuseError(f"{given}: needs configuration, recipes, site, or picture TITLE=RUN...")
    except FuseError as error:
        print("\n".join(map(str, error.args)), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
