"""`fit`"""


def add_options(parser):
    pass


def run(arguments):
    pass
