"""Products of rows and channels that are rounded to int8, each by its own largest magnitude, restated slowly."""


def rounded(values):
    """(whole numbers in -127 to 127, what 1 of them stands for): halves to the even one."""
    largest = max(map(abs, values))
    unit = largest / 127
    return [round(value / unit) if unit else 0 for value in values], unit


def product(rows, weight, bias=None):
    """x W^T + b of `rows` (a list of rows) and `weight` (a list of channels)."""
    channels = [rounded(channel) for channel in weight]
    made = []
    for row in rows:
        numbers, unit = rounded(row)
        sums = [sum(u * v for u, v in zip(numbers, own, strict=True)) * unit * size for own, size in channels]
        made.append([value + (bias[j] if bias else 0) for j, value in enumerate(sums)])
    return made
