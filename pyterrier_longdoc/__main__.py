"""`python -m pyterrier_longdoc`: see `pyterrier_longdoc.demo`."""

from .demo import main

if __name__ == "__main__":
    raise SystemExit(main())
