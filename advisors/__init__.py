"""Trace + budget -> Plan: one file per strategy."""
