"""Tables of the paper and of demur's own studies, each reproduced by one command."""
