from pathlib import Path


def written(name: str, text: str | bytes) -> Path:
    """A file below the working directory."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
