"""Recipes: their text, variables, steps, state and closing table."""
