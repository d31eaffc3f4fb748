"""Numbers on the command line that are outside of their range are bad usage: exit code 2, before anything is loaded."""

import pytest

from qlora_rl.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chat RUN --temperature -1", "argument --temperature: -1 is not at least 0"),
        ("chat RUN --top-p nan", "argument --top-p: nan is not finite and above 0 and at most 1"),
        ("eval RUN --data F --samples 0", "argument --samples: 0 is not at least 1"),
        ("eval RUN --data F --max-tokens ten", "argument --max-tokens: invalid whole number value: 'ten'"),
        ("export RUN --shard-gb 0", "argument --shard-gb: 0 is not above 0"),
        ("plan M --rank 0", "argument --rank: 0 is not at least 1"),
        ("plan M --gpu-memory 24gbb", "argument --gpu-memory: '24gbb' is not a size such as 24 or '24GB'"),
        ("recommend M --gpu-memory 0", "argument --gpu-memory: '0' is not a size such as 24 or '24GB'"),
        ("recommend M --max-length 0", "argument --max-length: 0 is not at least 1"),
        ("serve B --gpu-memory-utilization 1.5", "argument --gpu-memory-utilization: 1.5 is not at most 1"),
        ("report RUN --live --port 70000", "argument --port: 70000 is not at most 65535"),
        ("bench sync --steps 0", "argument --steps: 0 is not at least 1"),
        ("demo --temperature 0", "argument --temperature: 0 is not above 0"),
    ],
)
def test_a_number_out_of_range_is_bad_usage(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
