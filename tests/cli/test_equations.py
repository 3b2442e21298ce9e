from jaxinf.cli.equations import formulas

MOMENTUM = [
    "%0: float32 = mul #:float32, slot0:float32",
    "%1: float32 = add gradient, %0",
    "%2: float32 = mul scalar0:float32, %1",
    "update = %2",
    "trace = %1",
]


def test_momentum():
    assert formulas(MOMENTUM, ["trace"]) == [
        "trace' = gradient + # * trace",
        "update = scalar0 * trace'",
    ]


def test_order_of_evaluation_is_kept():
    lines = [
        "%0: float32 = mul gradient, params",
        "%1: float32 = mul scalar0:float32, %0",
        "%2: float32 = sub %1, gradient",
        "%3: float32 = sub params, %2",
        "%4: float32 = div %3, scalar1:float32",
        "update = %4",
    ]
    assert formulas(lines, []) == [
        "update = (params - (scalar0 * (gradient * params) - gradient)) / scalar1"
    ]


def test_shared_values_and_functions():
    lines = [
        "%0: float32 = integer_pow[y=2] gradient",
        "%1: float32 = max %0, #:float32",
        "%2: float32 = add %1, %1",
        "update = %2",
        "mu = %2",
        "nu = 0",
    ]
    assert formulas(lines, ["mu", "nu"]) == [
        "t1 = max(integer_pow[y=2](gradient), #)",
        "update = t1 + t1",
        "mu' = update",
        "nu' = 0",
    ]


def test_what_is_not_understood_is_shown_as_it_stands():
    for lines in (["while %0 do"], ["update = %7"], [*MOMENTUM, "?"]):
        assert formulas(lines, ["trace"]) == lines
    assert formulas(MOMENTUM, []) == MOMENTUM
