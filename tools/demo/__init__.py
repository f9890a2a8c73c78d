"""The bundled demo: its languages, the generator of its text, the trainer of its model."""
