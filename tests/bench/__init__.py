"""Tests of the bench harness."""
