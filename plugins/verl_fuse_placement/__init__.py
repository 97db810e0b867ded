"""Devices of its own for the critic, which learns there while the next step generates."""
