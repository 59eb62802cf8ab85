"""Operators' answers as text: tables, sentences, tensors.

Pure; may import the audit's values. Begin reading at `command_reports`.
"""
