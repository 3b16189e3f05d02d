"""The status page: public values, escaped, replaced at once."""

import numpy as np
from support.federation import answer

from tfp_dpvi.federated import Factor, Server, StudyTerms, Synchronous, write_status


def test_a_page_says_what_happened(tmp_path):
    terms = StudyTerms("<heights>", Factor(np.zeros(2), np.ones(2)))
    server, page = Server(terms, ["a", "<b>", "c"], Synchronous(2)), tmp_path / "status.html"
    write_status(server, page)
    assert "under way" in page.read_text()
    for precision, task in zip((-5.0, 3.0, 3.0), server.due(), strict=True):
        change = Factor(np.zeros(2), np.full(2, precision))
        assert server.receive(task.hospital, answer(task, change, epsilon=0.25))
    server.receive("a", b"<script>")
    server.drop("c")
    write_status(server, page)
    text = page.read_text()
    assert "&lt;heights&gt;" in text
    assert "<b>" not in text
    assert "<script>" not in text
    for said in ("0.25", "it was dropped.", "refused", "a 0.", " sd"):
        assert said in text
    assert [path.name for path in tmp_path.iterdir()] == ["status.html"]
