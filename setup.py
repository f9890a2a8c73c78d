"""What pyproject.toml cannot say: recipes/ becomes a folder of the package, and links of README.md become absolute.

The package index shows README.md, where relative links and pictures would be broken.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
"""A link of Markdown, or a picture, to a file beside the text."""


def long_description(readme: str, repository: str | None) -> str:
    """Return `readme` with links to the files in `repository` (`[project.urls] Repository` in pyproject.toml).

    If there is no repository, only the text of each link is left.
    """
    if repository is None:
        return LINK.sub(r"\2", readme)
    files = {"": f"{repository.rstrip('/')}/blob/HEAD", "!": f"{repository.rstrip('/')}/raw/HEAD"}
    return LINK.sub(lambda found: f"{found[1]}[{found[2]}]({files[found[1]]}/{found[3]})", readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        packages=[*find_namespace_packages(include=["prunecli*"]), "prunecli.recipes.files"],
        package_dir={"prunecli.recipes.files": "recipes"},
        long_description=long_description(
            (ROOT / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
