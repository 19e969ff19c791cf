"""The checksum of a page, word by word."""

FACTOR, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
LANES = 8


def checksum(data: bytes) -> int:
    lanes = list(range(1, LANES + 1))
    block = 8 * LANES
    padded = data + bytes(block - len(data) % block)
    for at in range(0, len(padded), 8):
        lane = at // 8 % LANES
        lanes[lane] = _mixed(lanes[lane], int.from_bytes(padded[at : at + 8], "little"))
    total = len(data)
    for lane in lanes:
        total = _mixed(total, lane)
    return total


def _mixed(total: int, word: int) -> int:
    product = (total ^ word) * FACTOR & MASK
    return product ^ product >> 32
