"""How far two arrays are apart."""
import numpy as np


def relative_error(got, expected):
    """Norm of the difference over the norm of the expected; NaN or a wrong shape is an error of any size."""
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def assert_close(got, expected, limit, what):
    error = relative_error(got, expected)
    print(f"{what}: relative error {error:.2e} (limit {limit:.1e})")
    assert error <= limit, f"{what}: relative error {error:.3e} is above {limit:.1e}"
