"""The bundled programs are those that the generator makes, and print what stands behind them."""

from prunecli.demo import DATA, LM_DATA, LM_TEXTS
from tools.demo.programs import HELD_OUT, PROSE, main


def test_the_bundled_text_is_made_again_byte_for_byte(tmp_path):
    main(tmp_path)
    names = {f"{split}.{name}" for split in HELD_OUT for name in LM_TEXTS}
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in LM_DATA.iterdir()} == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (LM_DATA / name).read_bytes()
    assert (LM_DATA / "val.prose").read_bytes() == (DATA / f"val.{PROSE}").read_bytes()
