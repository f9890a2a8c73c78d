"""Analysis of statistics: similarity of selections, clusters of languages, plots."""
