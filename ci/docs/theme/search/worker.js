// Nothing is left to a worker: see main.js.
