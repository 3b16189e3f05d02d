"""Covariates in awkward units, which several benchmarks have: years, dollars and uneven levels."""

FORMULA = "y ~ age + income + sex + ward"
COVARIATES = {
    "age": {"type": "integer", "lower": 18, "upper": 90, "unit": "years"},
    "income": {
        "type": "continuous",
        "lower": 1000.0,
        "upper": 300000.0,
        "typical": [45000.0, 30000.0],
        "unit": "dollars",
    },
    "ward": {"type": "categorical", "categories": ["A", "B", "C"]},
    "sex": {"type": "binary"},
}
