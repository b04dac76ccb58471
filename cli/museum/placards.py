"""The texts of the demo: one long shared instruction, and the short facts of twenty-four artworks. Data only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARTWORKS", "SYSTEM_PROMPT", "Artwork"]


@dataclass(frozen=True, slots=True)
class Artwork:
    """One request: `slug` becomes its request id, `facts` its user message."""

    slug: str
    facts: str


SYSTEM_PROMPT = """\
You write the wall placards of a public art museum. A placard hangs beside one work of art and is read by people \
who are standing, who may have one minute, and who came to look rather than to read. Your text must send their \
eyes back to the work.

House style. Write one paragraph of two or three sentences, at most sixty words in all. Write in plain present \
tense. Name the artist, the year and the material once. Begin with something that can be seen in the work \
itself: a hand, a colour, the fall of the light, a direction of movement. Then give one fact that helps a \
visitor to understand why the work was made or how it was received. End with a reason to look again. Never \
address the reader as "you", never ask a question, and never praise: words such as masterpiece, iconic, \
stunning, famous and unique do not appear on our walls. Do not guess. If the facts below do not say something, \
it is not on the placard. Numbers keep their units, and titles keep the spelling that is given.

The reader. Many visitors read English as a second language, so sentences are short and words are common. \
Technical terms of art are explained in the same sentence or left out. Children read placards as well; nothing \
in the text may need a parent to explain it. Visitors with low vision hear the text read aloud by a guide, so \
there are no lists, no brackets, no abbreviations and no line breaks.

An example of a placard that follows the rules, for a work that is not in the list. "A grey heron stands with \
one foot lifted, and the whole pond seems to wait with it. The painter worked on silk in 1702 with a single \
brush, because ink on silk cannot be corrected. The one red line in the picture is the signature, low at the \
left edge."

Write the placard for the following work."""

ARTWORKS = (
    Artwork(
        "night-watch",
        "The Night Watch. Rembrandt van Rijn, 1642. Oil on canvas, 379.5 by 453.5 cm. A militia company of "
        "Amsterdam sets out, drums and muskets raised. In 1715 it was cut on all four sides to fit a wall.",
    ),
    Artwork(
        "pearl-earring",
        "Girl with a Pearl Earring. Johannes Vermeer, about 1665. Oil on canvas, 44.5 by 39 cm. A girl in a blue "
        "and yellow turban looks over her shoulder. It is a study of a face, not a portrait.",
    ),
    Artwork(
        "starry-night",
        "The Starry Night. Vincent van Gogh, 1889. Oil on canvas, 73.7 by 92.1 cm. Painted by day, from memory, "
        "in the asylum of Saint-Rémy. The bright star above the cypress is the planet Venus.",
    ),
    Artwork(
        "las-meninas",
        "Las Meninas. Diego Velázquez, 1656. Oil on canvas, about 320 by 280 cm. The princess Margarita among her "
        "maids; the painter stands at a huge canvas; a mirror shows the king and queen.",
    ),
    Artwork(
        "birth-of-venus",
        "The Birth of Venus. Sandro Botticelli, about 1485. Tempera on canvas, 172.5 by 278.5 cm. Winds blow the "
        "goddess ashore on a shell. Canvas was cheaper than wood and used for country houses.",
    ),
    Artwork(
        "mona-lisa",
        "Mona Lisa. Leonardo da Vinci, about 1503 to 1519. Oil on poplar wood, 77 by 53 cm. Hands folded on a "
        "chair arm, a winding road behind. It was stolen in 1911 and found two years later.",
    ),
    Artwork(
        "great-wave",
        "The Great Wave off Kanagawa. Katsushika Hokusai, about 1831. Colour woodblock print, 25.7 by 37.9 cm. "
        "Three boats under a wave, Mount Fuji small behind. The blue pigment came from Prussia.",
    ),
    Artwork(
        "kiss",
        "The Kiss. Gustav Klimt, 1908. Oil and gold leaf on canvas, 180 by 180 cm. A couple in patterned robes at "
        "the edge of a flowering meadow. Bought by the state before it was finished.",
    ),
    Artwork(
        "scream",
        "The Scream. Edvard Munch, 1893. Tempera and crayon on cardboard, 91 by 73.5 cm. A figure on a bridge "
        "holds its head under a red sky. The artist wrote that he felt a scream pass through nature.",
    ),
    Artwork(
        "guernica",
        "Guernica. Pablo Picasso, 1937. Oil on canvas, 349.3 by 776.6 cm. Black, white and grey: a horse, a bull, "
        "a lamp, people in fire. Made in weeks after the bombing of the town of Guernica.",
    ),
    Artwork(
        "earthly-delights",
        "The Garden of Earthly Delights. Hieronymus Bosch, between 1490 and 1510. Oil on three oak panels. "
        "Paradise left, a crowded garden in the middle, hell right. Closed, it shows a grey globe.",
    ),
    Artwork(
        "arnolfini",
        "The Arnolfini Portrait. Jan van Eyck, 1434. Oil on oak, 82.2 by 60 cm. A merchant and a woman join "
        "hands; a round mirror shows the room from behind; the painter signed on the wall.",
    ),
    Artwork(
        "wanderer",
        "Wanderer above the Sea of Fog. Caspar David Friedrich, about 1818. Oil on canvas, 94.8 by 74.8 cm. A man "
        "seen from behind on a rock. The mountains were put together from several drawings.",
    ),
    Artwork(
        "liberty",
        "Liberty Leading the People. Eugène Delacroix, 1830. Oil on canvas, 260 by 325 cm. A woman with a flag "
        "strides over a barricade. It remembers the July days of 1830 in Paris.",
    ),
    Artwork(
        "nighthawks",
        "Nighthawks. Edward Hopper, 1942. Oil on canvas, 84.1 by 152.4 cm. Four people in a lit diner on an empty "
        "corner. The diner has no door to the street. Finished weeks after Pearl Harbor.",
    ),
    Artwork(
        "american-gothic",
        "American Gothic. Grant Wood, 1930. Oil on board, 78 by 65.3 cm. A farmer with a pitchfork and his "
        "daughter before a white house. The models were the artist's dentist and his sister.",
    ),
    Artwork(
        "grande-jatte",
        "A Sunday on La Grande Jatte. Georges Seurat, 1884 to 1886. Oil on canvas, 207.5 by 308.1 cm. Strollers "
        "on an island in the Seine, made of small dots of pure colour set side by side.",
    ),
    Artwork(
        "hay-wain",
        "The Hay Wain. John Constable, 1821. Oil on canvas, 130.2 by 185.4 cm. A cart stands in a mill stream, a "
        "dog watches. It won a gold medal in Paris in 1824 before it was liked in London.",
    ),
    Artwork(
        "temeraire",
        "The Fighting Temeraire. J. M. W. Turner, 1839. Oil on canvas, 90.7 by 121.6 cm. A dark steam tug tows a "
        "pale warship to be broken up, at sunset. The artist never sold it.",
    ),
    Artwork(
        "judith",
        "Judith Slaying Holofernes. Artemisia Gentileschi, about 1620. Oil on canvas. Two women hold a man down; "
        "the sword is lit from the left. The maid helps with both arms, unlike in earlier pictures.",
    ),
    Artwork(
        "thinker",
        "The Thinker. Auguste Rodin, 1904. Bronze. A seated man leans his chin on the back of his hand. First "
        "made as a small figure above The Gates of Hell, where he stood for the poet Dante.",
    ),
    Artwork(
        "samothrace",
        "Winged Victory of Samothrace. Unknown sculptor, about 190 BC. Marble, 244 cm without the base. A goddess "
        "lands on a ship's bow, her dress pressed by wind. Found in pieces in 1863.",
    ),
    Artwork(
        "sunrise",
        "Impression, Sunrise. Claude Monet, 1872. Oil on canvas, 48 by 63 cm. An orange sun over the harbour of "
        "Le Havre. A critic took the word impression from its title, and a movement kept it.",
    ),
    Artwork(
        "dressing-table",
        "Self-Portrait at the Dressing Table. Zinaida Serebriakova, 1909. Oil on canvas, 75 by 65 cm. A young "
        "woman combs her hair among bottles and candles, seen in a mirror, on a snowbound farm.",
    ),
)
