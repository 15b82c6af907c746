"""The study as a site to read: `python -m gpt2.study.site.build`."""
