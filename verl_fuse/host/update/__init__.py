"""Updates actor and critic."""
