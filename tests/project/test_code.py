import ast
from pathlib import Path

LONGEST = 400


def test_files_stay_short(modules: dict[str, Path], root: Path) -> None:
    long = {
        str(path.relative_to(root)): n
        for path in modules.values()
        if (n := len(path.read_text().splitlines())) > LONGEST
    }
    assert not long


def test_modules_say_what_they_do(modules: dict[str, Path]) -> None:
    assert [name for name, path in modules.items() if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_public_names_exist(modules: dict[str, Path]) -> None:
    """Every name in an `__all__` is defined in its module, and none is listed twice."""
    wrong = []
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        listed: list[str] = []
        defined: set[str] = set()
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                    listed = ast.literal_eval(value)
                case ast.Assign(targets=targets):
                    defined |= {t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=target)):
                    defined.add(target)
                case ast.FunctionDef(name=target) | ast.AsyncFunctionDef(name=target) | ast.ClassDef(name=target):
                    defined.add(target)
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    defined |= {alias.asname or alias.name for alias in names}
        wrong += [f"{name}.{public}" for public in listed if public not in defined]
        wrong += [f"{name}.{public} twice" for public in set(listed) if listed.count(public) > 1]
    assert not wrong
