"""Times on a real GPU: `python -m gpt2.study.timing.run FOLDER`."""
