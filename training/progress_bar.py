"""A progress bar on a terminal, of rank 0 alone.

with progress_bar("evaluating on the test set", total=10_000, is_main=world.is_main) as bar:
    bar.update(256)
"""

from tqdm import tqdm

FORMAT = "{desc} {percentage:3.0f}%|{bar}| {remaining}, {rate_fmt}{postfix}"


def progress_bar(title: str, total: int, *, is_main: bool, done: int = 0) -> tqdm:
    """A bar over samples that disappears at its end, hidden off a terminal and on other ranks."""
    return tqdm(
        total=total,
        initial=done,
        desc=title,
        unit=" samples",
        unit_scale=True,
        leave=False,
        dynamic_ncols=True,
        bar_format=FORMAT,
        disable=None if is_main else True,  # None: unless stderr is a terminal
    )
