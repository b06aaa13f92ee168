"""`python -m mlx_server` is the `mlx-serve` command. While the rest is imported, Ctrl-C ends the process without a
traceback; `main` takes that over."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has it ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from mlx_server.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
