"""The walk of a value: through which functions and files it is handed, found in the source text without running it.

    python tests/walks.py reshard/verbs/plan.py plan source [--parts]

The value is an argument and what functions make of it, as far as annotations say that it is a value of this package: `opened(source)` is a
Checkpoint, `Draft.of(source)` a Draft. With --parts it is also what lies in it: `Checkpoint.index` is an Index. The walk follows calls that
pass it on, in the order in which they stand, into all branches, and each function once with the same arguments. Calls in a `raise` are left
out: there the way ends. Of the commit of review 3 it says with --parts for plan(source): 68 stays in 32 files, 28 climbs, 36 returns;
the review counted 75 stays in 34 files, 24 climbs, 41 returns.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Defined:
    """A function or a class, and the class that it is a method of."""

    path: Path
    node: ast.FunctionDef | ast.ClassDef
    owner: Defined | None = None

    @property
    def name(self) -> str:
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name

    def member(self, name: str) -> Defined | ast.expr | None:
        """A method, or the annotation of a field; those of base classes, too."""
        for node in self.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Defined(self.path, node, self)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return node.annotation
        bases = (known(self.path, base.id) for base in getattr(self.node, "bases", ()) if isinstance(base, ast.Name))
        return next((found for base in bases if base and (found := base.member(name))), None)


def file_of(module: str) -> Path | None:
    """The file of a dotted name: reshard.formats, reshard.cli and reshard.plugins lie beside reshard/."""
    parts = module.split(".")
    base = ROOT.joinpath(*(parts[1:] if parts[1:2] in (["formats"], ["cli"], ["plugins"]) else parts))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> dict[str, tuple[Path, str]]:
    """What each imported name stands for: (file, name), with an empty name for the file itself."""
    found = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reshard"):
            for alias in node.names:
                module, inside = file_of(f"{node.module}.{alias.name}"), file_of(node.module or "")
                if target := (module, "") if module else (inside, alias.name) if inside and inside != path else None:
                    found[alias.asname or alias.name] = target
    return found


@cache
def known(path: Path, name: str) -> Defined | None:
    """The function or class that a name stands for in a file."""
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Defined(path, node)
    inside, original = imports(path).get(name, (path, ""))
    return known(inside, original) if original else None


def of_annotation(path: Path, annotation: ast.expr | None) -> Defined | None:
    """The class of this package that an annotation names: itself, or in a union."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        return of_annotation(path, annotation.left) or of_annotation(path, annotation.right)
    found = known(path, annotation.id) if isinstance(annotation, ast.Name) else None
    return found if found and isinstance(found.node, ast.ClassDef) else None


@dataclass
class Walk:
    """The functions that a value comes to, in order, with the depth of the call. parts: whether what lies in it is followed, too."""

    parts: bool = False
    visits: list[tuple[Defined, int]] = field(default_factory=list)
    seen: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def stays(self) -> list[Path]:
        """The files in order; a file counts again when the value comes back to it."""
        paths = [defined.path for defined, _ in self.visits]
        return [path for i, path in enumerate(paths) if i == 0 or path != paths[i - 1]]

    @property
    def files(self) -> set[Path]:
        return set(self.stays)

    @property
    def climbs(self) -> list[tuple[Path, Path]]:
        """The steps to a file that, by itself or through others, imports the one that is left."""
        return [(here, there) for here, there in zip(self.stays, self.stays[1:], strict=False) if here in reach(there)]

    def enter(self, defined: Defined, given: frozenset[str], depth: int = 0) -> None:
        """Visit a function that gets the value as the parameters `given`."""
        if (defined.path, defined.name, given) not in self.seen:
            self.seen.add((defined.path, defined.name, given))
            self.visits.append((defined, depth))
            if isinstance(defined.node, ast.FunctionDef):
                Body(self, defined, given, depth).read()


@cache
def reach(path: Path) -> frozenset[Path]:
    """All files that a file imports, by itself or through others."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for other, _ in imports(waiting.pop()).values():
            if other not in found:
                found.add(other)
                waiting.append(other)
    return frozenset(found)


class Body:
    """A function's body while it is read: which names hold the value, and of which class they are."""

    def __init__(self, walk: Walk, function: Defined, given: frozenset[str], depth: int) -> None:
        self.walk, self.function, self.path, self.depth = walk, function, function.path, depth
        arguments = function.node.args  # type: ignore[union-attr]
        self.holds: dict[str, Defined | None] = {}
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if each.arg in given:
                self.holds[each.arg] = function.owner if each.arg == "self" else of_annotation(self.path, each.annotation)
        self.rows: dict[str, str] = {}

    def read(self) -> None:
        for statement in self.function.node.body:
            self.go(statement)

    def go(self, node: ast.AST) -> None:
        if isinstance(node, ast.Raise):
            return
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and (names := self.table(node.iter)):
            for name in names:  # a loop over a table of functions
                self.rows[node.target.id] = name
                for inner in node.body:
                    self.go(inner)
            return
        for inner in ast.iter_child_nodes(node):
            self.go(inner)
        if isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.bind(target, node.value)

    def table(self, iterated: ast.expr) -> list[str]:
        """The names in a tuple of functions at the file's top level."""
        for node in tree(self.path).body:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(iterated, ast.Name) and isinstance(target, ast.Name) and target.id == iterated.id:
                row = node.value  # type: ignore[union-attr]
                return [each.id for each in row.elts if isinstance(each, ast.Name)] if isinstance(row, ast.Tuple) else []
        return []

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for inner, each in zip(target.elts, value.elts, strict=True):
                self.bind(inner, each)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call) and self.is_value(value.func, *value.args):
            called = self.called(value)
            returned = getattr(called.node, "returns", None) if called else None
            if called and isinstance(returned, ast.Subscript) and isinstance(returned.slice, ast.Tuple):
                for inner, annotation in zip(target.elts, returned.slice.elts, strict=False):
                    if isinstance(inner, ast.Name) and (found := of_annotation(called.path, annotation)):
                        self.holds[inner.id] = found
        elif isinstance(target, ast.Name):
            if isinstance(value, ast.Name) and value.id in self.holds:
                self.holds[target.id] = self.holds[value.id]
            elif found := self.class_of(value):
                self.holds[target.id] = found

    def is_value(self, *expressions: ast.expr) -> bool:
        return any((isinstance(each, ast.Name) and each.id in self.holds) or self.class_of(each) is not None for each in expressions)

    def class_of(self, expression: ast.expr) -> Defined | None:
        """The class of an expression that holds the value; None if it does not."""
        match expression:
            case ast.Name():
                return self.holds.get(expression.id)
            case ast.Attribute() if self.walk.parts:
                owner = self.class_of(expression.value)
                found = owner.member(expression.attr) if owner else None
                if isinstance(found, Defined):  # a property, or a method that is called
                    return of_annotation(found.path, getattr(found.node, "returns", None))
                return of_annotation(owner.path, found) if owner and found else None
            case ast.Call(func=ast.Name(id="replace"), args=[first, *_]):
                return self.class_of(first)
            case ast.Call(func=ast.Attribute()) if self.walk.parts and self.class_of(expression.func.value):  # type: ignore[attr-defined]
                return self.class_of(expression.func)
            case ast.Call() if self.is_value(*expression.args, *(each.value for each in expression.keywords)):
                called = self.called(expression)
                if called and isinstance(called.node, ast.ClassDef):
                    return called
                return of_annotation(called.path, called.node.returns) if called and isinstance(called.node, ast.FunctionDef) else None
            case ast.BoolOp() | ast.IfExp():
                parts = expression.values if isinstance(expression, ast.BoolOp) else [expression.body, expression.orelse]
                return next((found for part in parts if (found := self.class_of(part))), None)
        return None

    def called(self, call: ast.Call) -> Defined | None:
        """The function or class that a call names."""
        match call.func:
            case ast.Name(id=name):
                return known(self.path, self.rows.get(name, name))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                if name in imports(self.path) and not imports(self.path)[name][1]:
                    return known(imports(self.path)[name][0], attribute)
                owner = self.holds.get(name) or known(self.path, name)
            case ast.Attribute(value=inner, attr=attribute):
                owner = self.class_of(inner)
            case _:
                return None
        found = owner.member(attribute) if owner and isinstance(owner.node, ast.ClassDef) else None
        return found if isinstance(found, Defined) else None

    def call(self, call: ast.Call) -> None:
        called = self.called(call)
        if called is None:
            return
        if isinstance(called.node, ast.ClassDef):
            made = called.member("__init__")
            if not isinstance(made, Defined):
                if self.is_value(*call.args, *(each.value for each in call.keywords)):
                    self.walk.enter(called, frozenset(), self.depth + 1)
                return
            called = made
        assert isinstance(called.node, ast.FunctionDef)
        names = [each.arg for each in (*called.node.args.posonlyargs, *called.node.args.args)]
        is_static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in called.node.decorator_list)
        if called.owner and not is_static:
            names = names[1:]
        given = {name for name, value in zip(names, call.args, strict=False) if self.is_value(value)}
        given |= {each.arg for each in call.keywords if each.arg and self.is_value(each.value)}
        if called.owner and not is_static and isinstance(call.func, ast.Attribute) and self.is_value(call.func.value):
            given.add("self")
        if given:
            self.walk.enter(called, frozenset(given), self.depth + 1)


def walk_of(path: str, function: str, parameter: str, *, parts: bool = False) -> Walk:
    """The walk of one argument of a function. path: of its file, below the repository."""
    found, start = Walk(parts), known(ROOT / path, function)
    assert start is not None, f"{path} has no function {function}"
    found.enter(start, frozenset({parameter}))
    return found


def lines(walk: Walk) -> Iterator[str]:
    """The walk as a tree of calls, and its measures."""
    for defined, depth in walk.visits:
        yield f"{'  ' * depth}{defined.path.relative_to(ROOT)} {defined.name}"
    stays, files = len(walk.stays), len(walk.files)
    yield f"{len(walk.visits)} functions, {stays} stays in {files} files, {len(walk.climbs)} climbs, {stays - files} returns"


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--parts"]
    print(*lines(walk_of(*arguments, parts="--parts" in sys.argv)), sep="\n")
