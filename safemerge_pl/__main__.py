"""``python -m safemerge_pl`` is ``safemerge``."""

from safemerge_pl.cli import main

if __name__ == "__main__":
    main()
