//! GEMMs in device memory.

use super::operation::{CallOperands, GemmOperation};
use super::*;
use crate::memory::Memory;
use crate::numbers::{E4M3, E5M2, from_bf16, to_bf16};
use crate::poison::POISON;
use crate::random::Random;
use crate::settings::Arch;

const HOPPER: Arch = Arch { major: 9, minor: 0 };

/// Filler between columns.
const GAP: f32 = -3.5;

fn allocate(memory: &mut Memory, bytes: usize) -> u64 {
    memory.allocate(bytes as u64).unwrap()
}

fn encode(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Element::Bf16 => values.iter().flat_map(|&x| to_bf16(x).to_le_bytes()).collect(),
        Element::E4m3 => values.iter().map(|&x| E4M3.encode(x)).collect(),
        Element::E5m2 => values.iter().map(|&x| E5M2.encode(x)).collect(),
    }
}

fn decode(element: Element, bytes: &[u8]) -> Vec<f32> {
    match element {
        Element::F32 => bytes.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect(),
        Element::Bf16 => bytes.chunks(2).map(|x| from_bf16(u16::from_le_bytes([x[0], x[1]]))).collect(),
        Element::E4m3 => bytes.iter().map(|&x| E4M3.decode(x)).collect(),
        Element::E5m2 => bytes.iter().map(|&x| E5M2.decode(x)).collect(),
    }
}

/// A matrix in memory, filled with random numbers between gaps.
struct Stored {
    layout: GemmLayout,
    address: u64,
    values: Vec<f32>,
}

impl Stored {
    fn new(
        memory: &mut Memory,
        random: &mut Random,
        element: Element,
        [rows, columns]: [usize; 2],
        gap: usize,
    ) -> Stored {
        let layout = GemmLayout { element, rows, columns, leading: rows + gap };
        let number = |at: usize, random: &mut Random| match at % layout.leading < rows {
            true => random.below(1 << 16) as f32 / (1 << 14) as f32 - 2.0,
            false => GAP,
        };
        let values: Vec<f32> = (0..layout.leading * columns).map(|at| number(at, random)).collect();
        let bytes = encode(element, &values);
        let address = allocate(memory, bytes.len());
        memory.write(address, &bytes).unwrap();
        Stored { layout, address, values: decode(element, &bytes) }
    }

    /// The element of this matrix or of its transpose.
    fn at(&self, row: usize, column: usize, transposed: bool) -> f64 {
        let (row, column) = if transposed { (column, row) } else { (row, column) };
        self.values[column * self.layout.leading + row].into()
    }

    fn now(&self, memory: &Memory) -> Vec<f32> {
        let mut bytes = vec![0; self.values.len() * self.layout.element.bytes()];
        memory.read(self.address, &mut bytes).unwrap();
        decode(self.layout.element, &bytes)
    }
}

/// A GEMM with its operands in memory.
struct Case {
    memory: Memory,
    sizes: [usize; 3],
    desc: Desc,
    /// A, B, C and D.
    matrices: [Stored; 4],
    bias: Option<Stored>,
    /// Of A and B.
    scales: Option<[Stored; 2]>,
    workspace: u64,
}

const WORKSPACE_BYTES: usize = 80 << 10;

impl Case {
    fn new([m, n, k]: [usize; 3], elements: [Element; 3], transposed: [bool; 2], gap: usize) -> Case {
        let (mut memory, mut random) = (Memory::new(64 << 20), Random::new(3));
        let swapped = |size: [usize; 2], is_swapped| if is_swapped { [size[1], size[0]] } else { size };
        let extents = [swapped([m, k], transposed[0]), swapped([k, n], transposed[1]), [m, n], [m, n]];
        let [a, b, d] = elements;
        let workspace = allocate(&mut memory, WORKSPACE_BYTES);
        memory.write(workspace, &[1; WORKSPACE_BYTES]).unwrap();
        let elements = [a, b, d, d];
        let matrices =
            std::array::from_fn(|of| Stored::new(&mut memory, &mut random, elements[of], extents[of], gap));
        let desc = Desc { transposed, ..Desc::new(68, 0).unwrap() };
        Case { memory, sizes: [m, n, k], desc, matrices, bias: None, scales: None, workspace }
    }

    fn biased(mut self) -> Case {
        let (element, m) = (self.matrices[3].layout.element, self.sizes[0]);
        let bias = Stored::new(&mut self.memory, &mut Random::new(4), element, [m, 1], 0);
        (self.desc.has_bias, self.desc.bias) = (true, bias.address);
        Case { bias: Some(bias), ..self }
    }

    /// The scales of both operands, as the cuBLAS documentation has their layouts.
    fn scaled(mut self, modes: [ScaleMode; 2]) -> Case {
        let [m, n, k] = self.sizes;
        let blocks = k.div_ceil(128);
        let stored = [(m, modes[0]), (n, modes[1])].map(|(rows, mode)| {
            let (extents, gap) = match mode {
                ScaleMode::Tensor => ([1, 1], 0),
                ScaleMode::OuterVector => ([rows, 1], 0),
                ScaleMode::Vector128 => ([rows, blocks], 0),
                ScaleMode::Block128 => ([blocks, rows.div_ceil(128)], blocks.next_multiple_of(4) - blocks),
            };
            Stored::new(&mut self.memory, &mut Random::new(6), Element::F32, extents, gap)
        });
        (self.desc.scale_modes, self.desc.scales) = (modes, [stored[0].address, stored[1].address]);
        Case { scales: Some(stored), ..self }
    }

    fn scale(&self, of: usize, row: usize, at: usize) -> f64 {
        let Some(scales) = &self.scales else { return 1.0 };
        let (row, column) = match self.desc.scale_modes[of] {
            ScaleMode::Tensor => (0, 0),
            ScaleMode::OuterVector => (row, 0),
            ScaleMode::Vector128 => (row, at / 128),
            ScaleMode::Block128 => (at / 128, row / 128),
        };
        scales[of].at(row, column, false)
    }

    fn layouts(&self) -> [GemmLayout; 4] {
        self.matrices.each_ref().map(|of| of.layout)
    }

    fn gemm(&self) -> Result<GemmOperation, Refusal> {
        GemmOperation::new(HOPPER, self.desc, self.layouts())
    }

    fn operands(&self, alpha: f32, beta: f32) -> CallOperands {
        CallOperands {
            alpha,
            beta,
            matrices: self.matrices.each_ref().map(|of| of.address),
            workspace: self.workspace,
            workspace_bytes: WORKSPACE_BYTES as u64,
        }
    }

    fn run(&self, algorithm: Algorithm, operands: CallOperands) -> Result<(), String> {
        (self.gemm().unwrap().work(algorithm, operands).unwrap().run)(&self.memory)
    }

    /// Compares D with that of a plain loop, and the filler between its columns with the one before.
    fn check(&self, alpha: f32, beta: f32, algorithm: Algorithm) {
        self.run(algorithm, self.operands(alpha, beta)).unwrap();
        let ([m, n, k], [a, b, c, d]) = (self.sizes, &self.matrices);
        let bar = if d.layout.element == Element::Bf16 { 1e-2 } else { 1e-4 };
        let bar = if a.layout.element.is_fp8() { bar + 1e-2 } else { bar };
        let found = d.now(&self.memory);
        for (at, &found) in found.iter().enumerate() {
            let (row, column) = (at % d.layout.leading, at / d.layout.leading);
            if row >= m {
                assert_eq!(found, GAP);
                continue;
            }
            let terms = (0..k).map(|p| {
                let scale = self.scale(0, row, p) * self.scale(1, column, p);
                scale * a.at(row, p, self.desc.transposed[0]) * b.at(p, column, self.desc.transposed[1])
            });
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias.at(row, 0, false));
            let expected = f64::from(alpha) * sum + f64::from(beta) * c.at(row, column, false) + bias;
            let off = (f64::from(found) - expected).abs();
            assert!(off <= bar * (size + 1.0), "{row}, {column}: {found}, not {expected}; of {m}, {n}, {k}");
        }
    }
}

const PLAIN: [[Element; 3]; 3] =
    [[Element::F32; 3], [Element::Bf16; 3], [Element::Bf16, Element::Bf16, Element::F32]];

#[test]
fn gemms_are_those_of_a_plain_loop() {
    let transpositions = [[false, false], [false, true], [true, false], [true, true]];
    for (sizes, transposed) in [[1, 1, 1], [13, 5, 7], [33, 40, 129]]
        .into_iter()
        .flat_map(|sizes| transpositions.map(|transposed| (sizes, transposed)))
    {
        for (elements, gap) in PLAIN.into_iter().flat_map(|elements| [0, 3].map(|gap| (elements, gap))) {
            for (algorithm, [alpha, beta]) in Algorithm::ALL
                .into_iter()
                .flat_map(|of| [[1.0, 0.0], [1.0, 1.0], [0.5, -2.0]].map(|scalars| (of, scalars)))
            {
                Case::new(sizes, elements, transposed, gap).check(alpha, beta, algorithm);
                Case::new(sizes, elements, transposed, gap).biased().check(alpha, beta, algorithm);
            }
        }
    }
}

#[test]
fn algorithms_differ_in_the_last_bits_and_repeat() {
    let case = Case::new([40, 30, 999], [Element::F32; 3], [true, false], 0);
    let results = [Algorithm::Whole, Algorithm::Split, Algorithm::Whole, Algorithm::Split].map(|algorithm| {
        case.run(algorithm, case.operands(1.0, 0.0)).unwrap();
        case.matrices[3].now(&case.memory)
    });
    assert!(results[0] != results[1] && results[0] == results[2] && results[1] == results[3]);
}

fn fp8(sizes: [usize; 3], a: Element, b: Element, d: Element) -> Case {
    Case::new(sizes, [a, b, d], [true, false], 16)
}

#[test]
fn scales_belong_to_their_rows_and_blocks() {
    let modes = [
        [ScaleMode::Tensor; 2],
        [ScaleMode::OuterVector; 2],
        [ScaleMode::Vector128; 2],
        [ScaleMode::Vector128, ScaleMode::Block128],
        [ScaleMode::Block128, ScaleMode::Vector128],
    ];
    for (modes, d) in modes.into_iter().flat_map(|modes| [Element::F32, Element::Bf16].map(|d| (modes, d))) {
        for (a, b) in [(Element::E4m3, Element::E4m3), (Element::E5m2, Element::E4m3)] {
            for (algorithm, beta) in [(Algorithm::Whole, 0.0), (Algorithm::Split, 1.0)] {
                fp8([144, 144, 272], a, b, d).scaled(modes).check(1.0, beta, algorithm);
            }
        }
    }
    fp8([16, 32, 144], Element::E4m3, Element::E5m2, Element::Bf16).biased().check(
        2.0,
        1.0,
        Algorithm::Whole,
    );
}

#[test]
fn unsupported_gemms_are_refused() {
    let invalid = |change: fn(&mut Case)| {
        let mut case = Case::new([32, 48, 64], [Element::F32; 3], [false; 2], 0);
        change(&mut case);
        assert_eq!(case.gemm().err(), Some(Refusal::InvalidValue));
    };
    invalid(|case| case.matrices[0].layout.leading = 31);
    invalid(|case| case.matrices[1].layout.rows = 63);
    invalid(|case| case.matrices[2].layout.element = Element::Bf16);
    invalid(|case| case.desc.has_bias = true);
    for elements in [[Element::F32, Element::F32, Element::Bf16], [Element::F32, Element::Bf16, Element::F32]]
    {
        let refused = Case::new([32, 48, 64], elements, [false; 2], 0).gemm();
        assert_eq!(refused.err(), Some(Refusal::NotSupported));
    }

    let on = |case: &Case, [major, minor]: [u32; 2]| {
        GemmOperation::new(Arch { major, minor }, case.desc, case.layouts()).err()
    };
    let taken = || fp8([32, 48, 64], Element::E4m3, Element::E4m3, Element::F32);
    assert_eq!([[8, 9], [9, 0], [10, 0]].map(|arch| on(&taken(), arch)), [None; 3]);
    assert_eq!(on(&taken(), [8, 0]), Some(Refusal::NotSupported));
    for modes in [[ScaleMode::OuterVector; 2], [ScaleMode::Vector128; 2]] {
        let case = taken().scaled(modes);
        assert_eq!(on(&case, [9, 0]), None);
        assert_eq!([[8, 9], [10, 0]].map(|arch| on(&case, arch)), [Some(Refusal::NotSupported); 2]);
    }
    let refused = |change: fn(&mut Case)| {
        let mut case = taken();
        change(&mut case);
        assert_eq!(on(&case, [9, 0]), Some(Refusal::NotSupported));
    };
    refused(|case| [0, 1].into_iter().for_each(|of| case.matrices[of].layout.element = Element::E5m2));
    refused(|case| case.desc.scale_modes = [ScaleMode::OuterVector, ScaleMode::Tensor]);
    refused(|case| case.desc.scale_modes = [ScaleMode::OuterVector; 2]);
    refused(|case| case.matrices[0].layout.leading += 8);
    refused(|case| case.matrices[3].layout.leading += 2);
    refused(|case| (case.desc.has_bias, case.desc.bias) = (true, 16));
    for (sizes, transposed) in
        [([32, 48, 72], [true, false]), ([32, 32, 32], [false, false]), ([32, 32, 32], [true, true])]
    {
        let case = Case::new(sizes, [Element::E4m3, Element::E4m3, Element::F32], transposed, 0);
        assert_eq!(on(&case, [9, 0]), Some(Refusal::NotSupported));
    }
    let both_blocks = taken().scaled([ScaleMode::Block128; 2]);
    assert_eq!(on(&both_blocks, [9, 0]), Some(Refusal::NotSupported));
    for (modes, refusal) in
        [([ScaleMode::OuterVector; 2], None), ([ScaleMode::Vector128; 2], Some(Refusal::NotSupported))]
    {
        let mut case = taken().scaled(modes);
        case.desc.fast_accumulation = true;
        assert_eq!(on(&case, [9, 0]), refusal);
    }
}

#[test]
fn attributes_have_their_sizes_and_algorithms_their_words() {
    let mut desc = Desc::new(68, 0).unwrap();
    assert_eq!(desc.set(3, &1i32.to_le_bytes()), Ok(()));
    assert!(desc.transposed == [true, false]);
    assert_eq!(desc.set(3, &1i64.to_le_bytes()), Err(Refusal::InvalidValue));
    assert_eq!(desc.set(99, &1i32.to_le_bytes()), Err(Refusal::InvalidValue));
    assert_eq!(Desc::new(77, 0).err(), Some(Refusal::NotSupported));
    for algorithm in Algorithm::ALL {
        assert_eq!(Algorithm::decode(algorithm.words()), Ok(algorithm));
        let mut words = algorithm.words();
        words[7] = 1;
        assert_eq!(Algorithm::decode(words), Err(Refusal::InvalidValue));
    }
    assert_eq!(Algorithm::decode([0; 8]), Err(Refusal::InvalidValue));
}

#[test]
fn a_preference_limits_the_algorithms() {
    let plain = Case::new([32, 48, 64], [Element::F32; 3], [false; 2], 0).gemm().unwrap();
    let fp8 = fp8([32, 48, 64], Element::E4m3, Element::E4m3, Element::F32).gemm().unwrap();
    let all = Preference { workspace_bytes: 64 << 10, ..Preference::default() };
    assert_eq!(plain.algorithms(&all), Algorithm::ALL);
    let one = [Algorithm::Whole];
    assert_eq!(plain.algorithms(&Preference { workspace_bytes: (64 << 10) - 1, ..all }), one);
    assert_eq!(plain.algorithms(&Preference { reductions: 0, ..all }), one);
    assert_eq!(plain.algorithms(&Preference { alignments: [4; 4], ..all }), Algorithm::ALL);
    assert_eq!(plain.algorithms(&Preference { alignments: [4, 2, 4, 4], ..all }), []);
    assert_eq!(fp8.algorithms(&Preference { alignments: [16; 4], ..all }), Algorithm::ALL);
    assert_eq!(fp8.algorithms(&Preference { alignments: [16, 16, 16, 8], ..all }), []);
}

#[test]
fn a_call_needs_pointers_and_its_workspace() {
    let case = Case::new([32, 48, 64], [Element::F32; 3], [false; 2], 0);
    let whole = case.operands(1.0, 0.0);
    let refused = |algorithm, operands| case.gemm().unwrap().work(algorithm, operands).err();
    for algorithm in Algorithm::ALL {
        assert_eq!(refused(algorithm, whole), None);
        for of in 0..4 {
            let mut wrong = whole;
            wrong.matrices[of] = 0;
            assert_eq!(refused(algorithm, wrong), Some(Refusal::InvalidValue));
            wrong.matrices[of] = whole.matrices[of] + 2;
            assert_eq!(refused(algorithm, wrong), Some(Refusal::NotSupported));
        }
    }
    let short = CallOperands { workspace_bytes: 1 << 10, ..whole };
    assert_eq!(refused(Algorithm::Whole, short), None);
    for wrong in [
        short,
        CallOperands { workspace: 0, ..whole },
        CallOperands { workspace: whole.workspace + 16, ..whole },
    ] {
        assert_eq!(refused(Algorithm::Split, wrong), Some(Refusal::InvalidValue));
    }
}

#[test]
fn a_split_gemm_overwrites_its_workspace() {
    let case = Case::new([32, 48, 64], [Element::F32; 3], [false; 2], 0);
    let workspace = || {
        let mut bytes = vec![0; WORKSPACE_BYTES];
        case.memory.read(case.workspace, &mut bytes).unwrap();
        bytes
    };
    case.run(Algorithm::Whole, case.operands(1.0, 0.0)).unwrap();
    assert_eq!(workspace(), [1; WORKSPACE_BYTES]);
    case.run(Algorithm::Split, case.operands(1.0, 0.0)).unwrap();
    let needed = Algorithm::Split.workspace_bytes() as usize;
    assert_eq!(workspace(), [vec![POISON; needed], vec![1; WORKSPACE_BYTES - needed]].concat());
}

#[test]
fn operands_must_lie_in_memory_and_be_written() {
    let case = || Case::new([32, 48, 64], [Element::F32; 3], [false; 2], 3);
    let forget = |case: &Case, of: usize, element: usize| {
        let address = case.matrices[of].address + 4 * element as u64;
        case.memory.bytes(address, 4).unwrap().forget();
    };
    let problem = |case: &Case, beta| case.run(Algorithm::Whole, case.operands(1.0, beta)).err();
    // Between the columns, and where C is not read.
    let within = case();
    (0..3).for_each(|of| forget(&within, of, within.layouts()[of].rows));
    assert_eq!(problem(&within, 1.0), None);
    forget(&within, 2, 0);
    assert_eq!(problem(&within, 0.0), None);
    for (of, name) in ["A", "B", "C"].into_iter().enumerate() {
        let case = case();
        forget(&case, of, case.layouts()[of].leading);
        let text = problem(&case, 1.0).unwrap();
        assert!(text.starts_with(&format!("a GEMM reads elements of {name} that were never")), "{text}");
    }
    for (of, does) in ["reads A", "reads B", "reads C", "writes D"].into_iter().enumerate() {
        let mut case = case();
        let last = case.layouts()[of].columns;
        case.matrices[of].address += 4 * (case.layouts()[of].leading * last) as u64;
        let text = problem(&case, 1.0).unwrap();
        assert!(text.starts_with(&format!("a GEMM {does} out of bounds: ")), "{text}");
    }
    // Elements of D become written, the filler between its columns does not.
    let unwritten = case();
    (0..48 * 35).for_each(|element| forget(&unwritten, 3, element));
    assert_eq!(problem(&unwritten, 0.0), None);
    let marks =
        |element: u64| unwritten.memory.bytes(unwritten.matrices[3].address + 4 * element, 4).unwrap();
    assert!(marks(31).is_written() && !marks(32).is_written() && marks(35).is_written());
}
