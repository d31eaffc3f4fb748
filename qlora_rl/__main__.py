"""`python -m qlora_rl`: the command, where it is not on the PATH (a notebook's kernel)."""

import sys

from qlora_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
