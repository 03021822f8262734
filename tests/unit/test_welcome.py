"""The welcome notebook as it stands in the repository."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat

from images.lab import scene

GUEST = Path(__file__).parents[2] / "images/lab/guest"
NOTEBOOK = GUEST / "etc/skel/welcome/ndvi.ipynb"


def test_it_is_a_valid_notebook_without_outputs() -> None:
    book = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    assert set(book.metadata) == {"kernelspec", "language_info"}
    for cell in book.cells:
        assert cell.source.strip(), cell.id
        assert not cell.metadata, cell.id
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert NOTEBOOK.stat().st_size < 32 << 10


def test_it_reads_the_scene_of_the_image_and_says_where_it_is_from() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    code = "\n".join(
        cell.source for cell in book.cells if cell.cell_type == "code" and cell.source[0] != "!"
    )
    strings = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert f"/{scene.DIRECTORY}/{scene.LANDSAT.file}" in strings
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    readme = (GUEST / scene.DIRECTORY / "README.md").read_text()
    for words in (text, readme):
        for part in ("Apache License 2.0", scene.LANDSAT.package, scene.LANDSAT.file, "Landsat 7"):
            assert part in words, part
