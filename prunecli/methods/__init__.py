"""The four papers, one folder each: measure (`score`), decide (`plan`), rewrite (`rewrite`)."""
