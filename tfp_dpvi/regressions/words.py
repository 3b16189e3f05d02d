"""A model's warnings in the words of a formula, a schema, a family and an epsilon."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping

from tfp_dpvi.regressions.outcomes import FAMILIES

LOG = logging.getLogger("tfp_dpvi")

# Said of columns; what else helps follows.
NOT_KNOWN = (
    "are not known: in bounds much wider than the records intervals can be wrong, and nothing else "
    "says so; declare typical=[mean, sd] in the schema"
)

_LARGER = (
    "take a larger epsilon, fewer terms, or typical values and bounds in the schema that are "
    "nearer to the truth"
)
# The beginnings of the model's sentences; `{fit}` is what helps against a family that does not fit.
_MEANINGS = (
    (
        r"training did not converge: its mean is (\S+) .*",
        r"the fit has not settled: its last steps are \1 posterior standard deviations from the "
        rf"result; {_LARGER}",
    ),
    (
        r"the two halves of the window differ \((.*)\).*",
        rf"the fit has not settled: its two halves differ (\1); {_LARGER}",
    ),
    (
        r"hardly any record counts: scores say (.*) of what they should \(limit (.*)\).*",
        r"hardly any record counts: all together say \1 of what they should (limit \2), as where "
        "typical values in the schema are in another unit than the records: mend these, or leave "
        "them out",
    ),
    (
        r"the released curvature is far from that .*\(mismatch (.*)\).*",
        r"columns are spread or correlated otherwise than in public_data, or in the schema's "
        r"invented records, and noise hides how (mismatch \1): give bounds and typical values that "
        "are nearer to the truth, or take fewer terms",
    ),
    (
        r"noise hides whether columns are correlated, .*",
        "noise hides whether columns are correlated: if they are, intervals are too narrow; take a "
        "larger epsilon or fewer terms, or pass public_data whose columns are correlated as the "
        "private ones are",
    ),
    (
        r"the clip is too small \(kappa (.*)\).*",
        r"most records count for less than they say (kappa \1), as they are unlike the schema's "
        "invented ones: give bounds and typical values that are nearer to the truth",
    ),
    (
        r"the likelihood does not fit: scores vary (\S+) times .*\((z = .*)\).*",
        r"family {family} does not fit: outcomes vary \1 times as much as it says (\2); {fit}",
    ),
    (
        r"the likelihood has the wrong shape: .*\((p = .*)\).*",
        r"family {family} does not fit: outcomes are not where it expects them (\1); {fit}",
    ),
    (
        r"the estimate of (.*) posterior standard deviations from that under a wider clip.*",
        r"family {family} does not fit: the estimate of \1 posterior standard deviations from that "
        "with more of the tails, and a fit without privacy would differ; {fit}",
    ),
    (
        r"the clip cuts (\S+) of the weighted scores \(limit (.*)\).*",
        r"\1 of the weighted evidence was cut, from the records that say most (limit \2): if "
        r"weights depend on outcomes, estimates are biased; " + _LARGER,
    ),
    (
        r"weights are so far below max_weight that .*",
        r"weights are so far below their upper of the schema that noise hides their mean, and with "
        r"it the width of intervals: give the largest weight that the design allows, or take a "
        r"larger epsilon",
    ),
    (
        r"the prior contradicts the records: it moves the estimate, and that of (.*) posterior .*",
        r"the prior contradicts the records: by it \1 posterior standard deviations from where the "
        "records alone have it; take a wider one by priors=, or give typical values in the schema "
        "where it has none",
    ),
    (
        r"the posterior of (.*) times as far from the last steps as .*",
        r"there are too few records for this noise: the interval of \1 times as wide, or as far "
        rf"from the last steps, as the method allows; {_LARGER}",
    ),
    (
        r"the information of (.*) times as large with a few extreme public inputs as .*",
        r"the information of \1 times as large with a few extreme ones of the schema's invented "
        "records as without them: if no record is like these, its interval is too narrow; give "
        "bounds and typical values that are nearer to the truth",
    ),
    (
        r"the posterior of (.*) times as wide as the prior.*",
        r"the interval of \1 times as wide as the prior's, which records rarely do: the fit has "
        "not settled, or family {family} does not fit; " + _LARGER + ", or {fit}",
    ),
)
_OF_CENSORED = (
    'try another family, such as "weibull" or "lognormal", or add terms; records that drop out '
    "before their limit do the same"
)
_OF_PERSONS = "rows of a person may be alike: add the persons' intercepts, (1 | unit); or "
# How the model's own sentences begin in the log.
_MODEL_SAYS = ("Do not trust the posterior's intervals", "The released values give no posterior")
NO_POSTERIOR = (
    "the noise left no posterior: the table says nothing of the records; take a larger epsilon, "
    "fewer terms or more records"
)


def in_own_words(
    sentence: str,
    family: str,
    names: Mapping[str, str],
    *,
    is_censored: bool = False,
    may_be_alike: bool = False,
) -> str:
    """Returns a model's warning in the words of a formula; one that is not known, with its names.

    Args:
      sentence: The model's warning.
      family: The family.
      names: The model's names of parameters, by the formula's.
      is_censored: Whether outcomes are, which rules out what other outcomes may try.
      may_be_alike: Whether persons have several rows, and the formula has no intercept of theirs.
    """
    remedy = _OF_CENSORED if is_censored else FAMILIES[family].remedy
    remedy = _OF_PERSONS + remedy if may_be_alike else remedy
    for name, inner in sorted(names.items(), key=lambda pair: -len(pair[1])):
        shown = name.replace("\\", r"\\")
        sentence = re.sub(rf"(?<!\w){re.escape(inner)}(?![\w\[])", shown, sentence)
    for pattern, meaning in _MEANINGS:
        found = re.fullmatch(pattern, sentence)
        if found:
            return found.expand(meaning).format(fit=remedy, family=family)
    return sentence


@contextlib.contextmanager
def own_log() -> Iterator[None]:
    """Keeps out of the log what the model says of its posterior: the caller says it again."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_MODEL_SAYS)

    LOG.addFilter(is_other)
    try:
        yield
    finally:
        LOG.removeFilter(is_other)
