"""The tables of the paper and of our own studies, each made again by one command."""
