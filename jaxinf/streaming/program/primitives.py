"""Names of JAX's primitives that are elementwise or cheap.

Invariant: a primitive that is not named here is kept whole and counts as expensive.
"""

from jaxinf.compat import ELEMENTWISE

__all__ = ["LIGHT", "POINTWISE"]

POINTWISE = ELEMENTWISE | frozenset(
    """
    acos acosh add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type clz copy copy_p cosh digamma erf erf_inv erfc imag is_finite
    lgamma mul optimization_barrier population_count real shift_left
    sharding_constraint shift_right_arithmetic shift_right_logical sinh stop_gradient
    tan
    """.split()
)
"""Primitives that compute each element from the elements at the same position."""

LIGHT = POINTWISE | frozenset(
    """
    argmax argmin broadcast_in_dim concatenate dynamic_slice dynamic_update_slice
    expand_dims gather iota pad random_bits random_clone random_fold_in random_seed
    random_split random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_sum reshape rev shift slice split squeeze stack threefry2x32
    transpose unstack
    """.split()
)
"""Primitives whose repeated computation costs less than keeping the result."""
