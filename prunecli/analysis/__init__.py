"""What statistics show: similarity of selections, clusters of languages, plots."""
