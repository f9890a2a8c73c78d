"""What is removed, shared or replaced: measured (`score`), decided (`plan`), rewritten (`rewrite_…`)."""
