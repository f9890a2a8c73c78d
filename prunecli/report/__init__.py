"""One self-contained HTML page from the results and checkpoints of a directory; nothing is run or loaded."""
