"""Blocks of K/V on an SSD: files of records, found by the same hashes as in memory."""
