"""Recipes: their text, variables, steps and state."""
