"""What the worker kind `comfyui` executes: its folder, with the package resvisor, is first in sys.path then."""

import os
import sys

if __name__ == "__main__":
    # The package must not hide one of ComfyUI's modules: its folder comes last.
    sys.path.append(sys.path.pop(0) if sys.path and sys.path[0] else os.path.dirname(os.path.abspath(__file__)))
    from resvisor.comfyui.launcher import main

    sys.exit(main(sys.argv[1:]))
