"""Numbers that are outside of their range, and paths that do not exist, are bad usage: exit code 2, before anything is
loaded."""

import pytest

from qlora_rl.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chat . --temperature -1", "argument --temperature: -1 is not at least 0"),
        ("chat . --top-p nan", "argument --top-p: nan is not finite and above 0 and at most 1"),
        ("eval . --data . --samples 0", "argument --samples: 0 is not at least 1"),
        ("eval . --data . --max-tokens ten", "argument --max-tokens: invalid whole number value: 'ten'"),
        ("plan M --rank 0", "argument --rank: 0 is not at least 1"),
        ("plan M --gpu-memory 24gbb", "argument --gpu-memory: '24gbb' is not a size such as 24 or '24GB'"),
        ("recommend M --gpu-memory 0", "argument --gpu-memory: '0' is not a size such as 24 or '24GB'"),
        ("recommend M --max-length 0", "argument --max-length: 0 is not at least 1"),
        ("serve B --gpu-memory-utilization 1.5", "argument --gpu-memory-utilization: 1.5 is not at most 1"),
        ("demo --steps 0", "argument --steps: 0 is not at least 1"),
        ("demo --temperature 0", "argument --temperature: 0 is not above 0"),
    ],
)
def test_a_number_out_of_range_is_bad_usage(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "judge X", "judge . --base X", "export X", "export . --base X", "export . --data X",
        "report . X", "chat X", "chat . --base X",
        "eval X", "eval . --data X", "eval . --base X",
    ],
)  # fmt: skip
def test_a_path_that_does_not_exist_is_bad_usage(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert f"there is no such file or directory: X (seen from {tmp_path})" in capsys.readouterr().err


def test_verifying_a_base_that_does_not_exist_could_not_tell(capsys, tmp_path):
    assert main(["verify", str(tmp_path / "nothing"), "--local"]) == 2
    assert "could not tell" in capsys.readouterr().err
