"""Audits a model: folds its journal and finds what must never be in it.

Pure but for the log that is read; may import `queued` of its parent. Begin reading at `journal_audit`.
"""
