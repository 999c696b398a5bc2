"""Instruments: studies and fits that commands run and that no other part of hpml needs."""
