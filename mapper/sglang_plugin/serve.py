"""Runs the stock SGLang server in this process: `python -m mapper.sglang_plugin.serve FLAGS`.

SGLang spawns its scheduler by importing the main module again, so what must come before
`import sglang` stands at this module's top level.
"""

from mapper.sglang_plugin.standins import install

install()


def main(argv: list[str]) -> None:
    import os

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_itself_when_parent_died, kill_process_tree

    kill_itself_when_parent_died()
    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
