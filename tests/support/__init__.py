"""What the tests of the private step share: models, oracles, and checks that take the thing under test."""
