"""Factorised embeddings are trained as they are."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from prunecli.commands.factorize_embeddings import factorize_embeddings
from tests.families import tiny_family
from tests.training.test_reduced import material_for, trained_and_written, unchanged


@pytest.mark.parametrize("family", ["m2m_100", "gpt2"])
def test_with_factorised_embeddings(tmp_path, family):
    model, source = tiny_family(tmp_path / "model", family), tmp_path / "reduced"
    app = typer.Typer()
    app.command()(factorize_embeddings)
    options = ("--map-dim", "8", "--expand-dim", "16", "--depth", "1", "--quiet")
    result = CliRunner().invoke(app, [str(model), *options, "-o", str(source)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = trained_and_written(source, tmp_path, material_for(family))
    assert unchanged(source, written) == set()
