"""The update of actor and critic."""
