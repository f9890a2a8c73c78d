"""What pyproject.toml cannot say: recipes/ becomes a folder of the package, and links of README.md become absolute.

The package index shows README.md, whose links to files of the repository lead nowhere there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
"""A link of Markdown to a file beside the text."""


def long_description(readme: str, repository: str | None) -> str:
    """`readme` with links to the files in `repository`, `[project.urls] Repository` of pyproject.toml.

    As long as none is known, the links' text alone is left.
    """
    if repository is None:
        return LINK.sub(r"\1", readme)
    return LINK.sub(lambda found: f"[{found[1]}]({repository.rstrip('/')}/blob/HEAD/{found[2]})", readme)


if __name__ == "__main__":
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        packages=[*find_namespace_packages(include=["prunecli*"]), "prunecli.recipes.files"],
        package_dir={"prunecli.recipes.files": "recipes"},
        long_description=long_description(
            (ROOT / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
