"""The Jupyter that runs the notebooks: this interpreter, and nothing written outside the folder it is given.

`python -m gpt2.study.lab` opens JupyterLab on the notebooks; further words go to JupyterLab.
"""

import json
import os
import sys
from pathlib import Path

from ipykernel.kernelspec import get_kernel_dict
from traitlets.config import Config

from gpt2.study import paths

# Other users of the machine must not read along.
CONFIG = Config({"KernelManager": {"transport_encryption": "auto"}})


def variables(home: Path) -> dict[str, str]:
    """The variables that keep Jupyter, IPython, matplotlib and downloads inside `home`, and let kernels find us."""
    inside = {
        "IPYTHONDIR": "ipython",
        "JUPYTER_CONFIG_DIR": "jupyter/config",
        "JUPYTER_DATA_DIR": "jupyter/data",
        "JUPYTER_PATH": "jupyter/share",
        "JUPYTER_RUNTIME_DIR": "jupyter/runtime",
        "JUPYTERLAB_SETTINGS_DIR": "jupyter/lab/settings",
        "JUPYTERLAB_WORKSPACES_DIR": "jupyter/lab/workspaces",
        "MPLCONFIGDIR": "matplotlib",
        "XDG_CACHE_HOME": "cache",
        "HF_HOME": "cache/huggingface",
    }
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(paths.ROOT),
    }
    return fixed | {name: str(home / folder) for name, folder in inside.items()}


def prepare(home: Path) -> None:
    """Set the variables for this process and its children, and let the kernel `python3` be this interpreter."""
    os.environ.update(variables(home))
    spec = get_kernel_dict(["--log-level=CRITICAL"]) | {"display_name": "Python 3"}
    paths.write(Path(os.environ["JUPYTER_PATH"]) / "kernels" / "python3" / "kernel.json", json.dumps(spec).encode())


def main() -> None:
    """Become JupyterLab."""
    prepare(paths.state())
    options = [
        f"--ServerApp.root_dir={paths.ROOT}",
        "--LabApp.default_url=/lab/tree/notebooks",
        "--KernelManager.transport_encryption=auto",
    ]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *options, *sys.argv[1:]])


if __name__ == "__main__":
    main()
