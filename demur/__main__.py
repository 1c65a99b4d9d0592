"""python -m demur."""

from demur.cli import main

main()
