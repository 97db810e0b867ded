"""`python -m verl_fuse`: the command `verl-fuse` of this interpreter."""

from verl_fuse.cli.main import main

if __name__ == "__main__":
    main()
