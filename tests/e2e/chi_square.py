"""Are these counts what chance makes of that distribution?"""
import math

EXPECTED_MIN = 5.0  # rarer outcomes are counted together: the test is asymptotic


def p_of(chi_square, n_free):
    """The probability of at least this chi-square with so many degrees of freedom: the upper incomplete gamma function
    Q(n_free / 2, chi_square / 2), by its series below the maximum and its continued fraction (Lentz) above."""
    a, x = n_free / 2, chi_square / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return 1 - total * scale
    b = x + 1 - a
    c, d = 1e300, 1 / b
    fraction = d
    for i in range(1, 1000):
        b += 2
        d = 1 / (b - i * (i - a) * d)
        c = b - i * (i - a) / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return fraction * scale


def p_of_fit(counts, probabilities):
    """counts: outcome -> how often. probabilities: of the likely outcomes; what is left of 1 is that of all others."""
    n = sum(counts.values())
    likely = {outcome: p for outcome, p in probabilities.items() if n * p >= EXPECTED_MIN}
    pairs = [(counts.get(outcome, 0), n * p) for outcome, p in likely.items()]
    rest = n * (1 - sum(likely.values()))
    if rest >= EXPECTED_MIN:
        pairs.append((n - sum(count for count, _ in pairs), rest))
    assert len(pairs) > 1, "too few outcomes to compare"
    return p_of(sum((count - expected) ** 2 / expected for count, expected in pairs), len(pairs) - 1)


def p_of_same(counts_a, counts_b):
    """Whether two samples come from one distribution, whatever it is."""
    n_a, n_b = sum(counts_a.values()), sum(counts_b.values())
    n = n_a + n_b
    rare = [0, 0]
    cells = []
    for outcome in sorted({*counts_a, *counts_b}):
        cell = [counts_a.get(outcome, 0), counts_b.get(outcome, 0)]
        if sum(cell) * min(n_a, n_b) / n >= EXPECTED_MIN:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    if sum(rare) * min(n_a, n_b) / n >= EXPECTED_MIN:
        cells.append(rare)
    chi_square = 0.0
    for a, b in cells:
        for count, n_side in ((a, n_a), (b, n_b)):
            expected = (a + b) * n_side / n
            chi_square += (count - expected) ** 2 / expected
    assert len(cells) > 1, "too few outcomes to compare"
    return p_of(chi_square, len(cells) - 1)
